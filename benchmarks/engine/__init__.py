"""`make bench-engine`: the verifier under load, without draft models on its cores."""

import outrider.common.process.short_spins  # noqa: F401  steps here are computed as in a verifier
