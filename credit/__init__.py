"""spangrad.credit: see README.md in this folder."""
