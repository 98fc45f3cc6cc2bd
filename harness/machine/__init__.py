"""The device under test: its identity, NVML, telemetry."""
