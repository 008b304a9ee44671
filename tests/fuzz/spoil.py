"""Files as disks, networks and editors leave them."""

from hypothesis import strategies as st

HUNDREDTHS = st.integers(0, 99)


@st.composite
def spoilt(draw: st.DrawFn, data: bytes) -> bytes:
    """`data` as it is, cut short, or with some bytes changed, put in or taken out."""
    for kind in draw(st.lists(st.sampled_from(["cut", "change", "insert", "remove"]), max_size=3)):
        # In hundredths of hundredths: Hypothesis prefers small numbers where there are many, and so the first bytes.
        place = min(len(data), len(data) * (100 * draw(HUNDREDTHS) + draw(HUNDREDTHS)) // 9999)
        if kind == "cut":
            data = data[:place]
        elif kind == "insert":
            data = data[:place] + draw(st.binary(min_size=1, max_size=8)) + data[place:]
        else:
            end = place + draw(st.integers(1, 8))
            kept = b"" if kind == "remove" else draw(st.binary(min_size=min(8, end - place), max_size=8))
            data = data[:place] + kept + data[end:]
    return data
