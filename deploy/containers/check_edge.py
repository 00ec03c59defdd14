"""Health of the container: exit status 0 while the daemon answers /health. Its HOST:PORT."""

import sys
import urllib.request

address = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:7079"
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
try:
    opener.open(f"http://{address}/health", timeout=4).close()
except OSError as error:
    sys.exit(f"no health at {address}: {error}")
