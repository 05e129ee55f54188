"""stub

    make experiment NAME=inside
"""
from inside.models import *
from inside.models import bases, faulty, retrained
from groups.ways import BASES
from lab.sizes import probes, to_the_end
from pathlib import Path
HERE = Path(__file__).parent
def plan():
    known = faulty()
    tried = [run for some in (probes, to_the_end) for model in BASES.values() for run in some(model)]
    order = sorted(known, key=lambda k: (k[2], k[1] != "misspelt"))
    return [*tried, *(known[key] for key in order), *(run for key in order for run in retrained(known[key]))]
def report(): pass
def tables(f): return {}
