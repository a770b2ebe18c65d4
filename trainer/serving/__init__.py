"""A vLLM server, new weights into it, and proof that it serves them."""
