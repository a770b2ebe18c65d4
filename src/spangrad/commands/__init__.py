"""The subcommands of `spangrad`, by what they are for. Nothing heavy is imported before a command runs."""
