"""Cannot be imported: it imports what is not there."""

import not_installed_anywhere  # noqa: F401
