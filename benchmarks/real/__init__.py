"""What a stranger sees of the product in real processes: start-up, memory, the demo."""

import outrider.common.process.short_spins  # noqa: F401  steps here are computed as in a verifier
