"""`python -m shardwise`, which is also what `torchrun -m shardwise serve` runs."""

import sys

from shardwise.cli import main

sys.exit(main())
