"""Commands: arguments become a configuration and one call. Nothing heavy is loaded for `--help`."""
