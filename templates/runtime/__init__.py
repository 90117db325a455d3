"""The driver of emitted modules: attention by tuned kernels, on arrays of any library.

Modules under ``out/`` import it; `flashgen emit` puts it into theirs, one file after the other, so that they
stand alone with numpy. What begins with an underscore is the runtime's own, whichever file it is
in: all of them are one module there, whose annotations are evaluated as they are met.
"""

from .arrays import Array
from .attention import Attention
from .facts import Launch, TensorMap, Tuned
from .program import run_module
from .table import Choice

__all__ = ["Array", "Attention", "Choice", "Launch", "TensorMap", "Tuned", "run_module"]
