"""`python -m outrider.cloud_verifier` is `cloud-verifier`."""

import sys

from outrider.cloud_verifier.server.cli import main

sys.exit(main())
