"""Framework of every command: settings, options, help, errors as two lines."""
