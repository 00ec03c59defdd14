"""`python -m outrider.edge_client` is `edge-client`."""

import sys

from outrider.edge_client.cli import main

sys.exit(main())
