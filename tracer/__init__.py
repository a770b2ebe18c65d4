"""spangrad.tracer: see README.md in this folder."""
