"""Small policies from nothing, cloned from a scripted expert."""
