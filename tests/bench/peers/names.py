"""Names that both sides of a peer's job use; no imports."""

STEPS = "TFT_BENCH_STEPS"
