"""Examples, each a folder with a job file. They use rayzero as any user would."""
