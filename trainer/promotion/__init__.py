"""Promotion: which version production is served, and what becomes of those that fail."""
