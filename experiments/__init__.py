"""The chapters. Each is run by its name, as in `python -m experiments.snap RUN`."""

import signal
import sys

if sys.argv[0] == "-m":  # a chapter starts: Ctrl-C and a closed pipe end it without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(getattr(signal, "SIGPIPE", signal.SIGINT), signal.SIG_DFL)  # not in Windows
