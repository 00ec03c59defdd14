"""`python -m outrider.edge_client` is `edge-client`."""

import sys

from outrider.edge_client.commands.cli import main

sys.exit(main())
