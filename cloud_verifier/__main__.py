"""`python -m outrider.cloud_verifier` is `cloud-verifier`."""

import sys

from outrider.cloud_verifier.cli import main

sys.exit(main())
