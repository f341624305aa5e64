"""Run as `python3 bench/on_gpu`, where nothing of memfit is installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from on_gpu.run import main

sys.exit(main())
