"""Becomes `accelerate launch --cpu` of the script and arguments that it is given, on every rank."""

import os
import sys
from pathlib import Path

script, *rest = sys.argv[1:]
command = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", "--num_machines", "1"]
os.execv(sys.executable, [sys.executable, *command, str(Path(__file__).parent / script), *rest])
