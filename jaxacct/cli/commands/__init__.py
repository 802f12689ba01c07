"""The commands, a module each; the function `command` is what runs."""
