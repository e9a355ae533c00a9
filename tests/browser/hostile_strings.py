"""Strings that would run script if any place parsed them as HTML, as a URL or as code. Each calls `hit` when it runs."""

from itertools import cycle, islice, product

CALL = "window.hit=1"
_TAGS = (
    "<script>{c}</script>",
    "<img src=x onerror={c}>",
    "<svg onload={c}>",
    "<svg><script>{c}</script></svg>",
    "<iframe srcdoc='<script>parent.{c}</script>'>",
    "<iframe src=javascript:parent.{c}>",
    "<a href=javascript:{c}>x</a>",
    "<body onload={c}>",
    "<details open ontoggle={c}>",
    "<input autofocus onfocus={c}>",
    "<math><mtext><script>{c}</script>",
    "<style onload={c}></style>",
    "<object data=javascript:{c}>",
    "<template><script>{c}</script></template>",
    "<base href=//attacker.example/>",
    "<link rel=stylesheet href=//attacker.example/x.css onload={c}>",
    "<meta http-equiv=refresh content='0;url=javascript:{c}'>",
    "<form action=javascript:{c}><button autofocus>x</button></form>",
    "<video><source onerror={c}></video>",
    "<marquee onstart={c}>",
)
_WRAPPERS = (
    "{t}",
    '">{t}',
    "'>{t}",
    "</textarea>{t}",
    "</title>{t}",
    "</script>{t}",
    "-->{t}",
    "]]>{t}",
    "\u202e{t}",
    "${{{t}}}",
)
COUNT = 200


def hostile_strings() -> list[str]:
    """The same 200 in every run, all different."""
    pairs = product(_WRAPPERS, _TAGS)
    strings = [wrapper.format(t=tag.format(c=CALL)) for wrapper, tag in islice(cycle(pairs), COUNT)]
    assert len(set(strings)) == COUNT, "each is another"
    return strings
