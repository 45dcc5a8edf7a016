"""Opens, replaces and locks files: only regular files are opened, and a replaced file is either the full old or the full new one."""
