"""`python -m diversed COMMAND` is `diversed COMMAND`."""

import sys

if not sys.flags.safe_path:
    # Python looks for code in the current folder first; `diversed` does so only if PYTHONPATH says
    # so.
    del sys.path[0]

from .cli import main  # noqa: E402

sys.exit(main())
