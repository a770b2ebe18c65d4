"""spangrad.adapters: see README.md in this folder."""
