"""How the HTML report looks: on a phone, on a wide screen, on paper; light and dark. The server's page looks the same.

The two backends have the blue and the orange that people with any colour vision can tell apart, and different marks.
"""

from __future__ import annotations

from prefixwise.web.files import report_style

STYLE = report_style()
