"""The subcommands of the command line, each in a module with `run(config, options) -> exit code`."""
