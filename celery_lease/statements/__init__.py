"""Every SQL statement of the library, one file a topic; nothing else builds SQL.

Statements are built once, at import, with named parameters. The guards stand in
``guards``: a statement that changes a run or a lease names the guard it relies on, and for
each there is a test that fails without it.
"""

from __future__ import annotations
