"""`python -m diversed COMMAND` is `diversed COMMAND`."""

import sys

from .cli import main

sys.exit(main())
