"""spangrad.store: see README.md in this folder."""
