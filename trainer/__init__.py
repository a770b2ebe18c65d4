"""spangrad.trainer: see README.md in this folder."""
