"""What every command is made of: settings, options, help, errors as two lines."""
