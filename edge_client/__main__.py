"""`python -m edge_client` is `edge-client`."""

import sys

from edge_client.cli import main

sys.exit(main())
