"""The simulator: runs the live coordinator, pools and batchers on virtual time. Manual: docs/simulator.md."""
