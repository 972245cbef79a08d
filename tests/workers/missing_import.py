"""Imports a module that does not exist."""

import not_installed_anywhere  # noqa: F401
