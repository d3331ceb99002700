"""`python -m warpring` is `warpring`."""

import sys

from warpring.cli import main

sys.exit(main())
