"""An import that survives a killed and a paused worker: ``python -m examples.demo``.

Read ``app.py`` first: it is all that an application writes. ``story.py`` is what the demo does
to it, ``proof.py`` is how it is judged; the rest starts processes and draws.
"""

from __future__ import annotations
