"""Reading and printing memory sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import SizeError
from planner.plan_types.sizes import GIB, KIB, MIB, format_size, parse_size

pytestmark = pytest.mark.no_torch


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("6GiB", 6 * GIB),
        ("6 gib", 6 * GIB),
        ("  6Gi\t", 6 * GIB),
        ("1.5GiB", 3 * GIB // 2),
        (".5gib", GIB // 2),
        ("6.GiB", 6 * GIB),
        ("812MiB", 812 * MIB),
        ("812Mi", 812 * MIB),
        ("64KiB", 64 * KIB),
        ("1TiB", 1024 * GIB),
        ("6GB", 6 * 10**9),
        ("6g", 6 * 10**9),
        ("6000 mb", 6 * 10**9),
        ("6000M", 6 * 10**9),
        ("64kb", 64_000),
        ("6442450944 B", 6 * GIB),
    ],
)
def test_binary_and_decimal_units_are_read_in_any_case_and_spacing(text: str, size_bytes: int) -> None:
    assert parse_size(text, device_bytes=None) == size_bytes


@pytest.mark.parametrize("written", [6 * GIB, str(6 * GIB)])
def test_a_plain_number_of_at_least_a_mebibyte_is_bytes(written: str | int) -> None:
    assert parse_size(written, device_bytes=None) == 6 * GIB
    assert parse_size(MIB, device_bytes=None) == MIB


def test_a_share_is_of_the_card() -> None:
    assert parse_size("80%", device_bytes=10 * GIB) == 8 * GIB
    assert parse_size("100 %", device_bytes=12345) == 12345


def test_limits_round_down() -> None:
    assert parse_size("33.3%", device_bytes=1000) == 333
    assert parse_size("0.0015KB", device_bytes=None) == 1
    assert parse_size("2.9999999999 B", device_bytes=None) == 2


@pytest.mark.parametrize(
    "text",
    [
        *("6gb of ram", "", "   ", "-3GiB", "0GiB", "0%", "nan", "inf", "6gib gib", "1e3GiB", "6XB", "GiB", "6,5GiB"),
        *("0.1B", "120%", "٦GiB", "6\nGiB\n7", "9" * 99 + "GiB", "6" * 5000),
    ],
)
def test_what_is_no_size_is_refused_on_one_line_with_the_value_and_a_way_out(text: str) -> None:
    with pytest.raises(SizeError) as caught:
        parse_size(text, device_bytes=8 * GIB)
    message = str(caught.value)
    assert repr(text)[:30] in message
    assert "6GiB" in message or "use GiB" in message
    assert len(message.splitlines()) == 1
    assert len(message) < 200


@pytest.mark.parametrize(("text", "hint"), [("6", "6GiB"), (6, "6GiB"), ("7.5", "7.5GiB"), (0, "6GiB")])
def test_a_number_without_a_unit_asks_whether_gibibytes_were_meant(text: str | int, hint: str) -> None:
    with pytest.raises(SizeError, match=f"did you mean {hint}\\?"):
        parse_size(text, device_bytes=None)


@pytest.mark.parametrize("value", [True, 6.5, None, b"6GiB", [6], -1, -(10**30)])
def test_other_types_and_negative_bytes_are_refused(value: object) -> None:
    with pytest.raises(SizeError, match="6GiB"):
        parse_size(value, device_bytes=None)


def test_a_share_of_an_unknown_card_is_refused() -> None:
    with pytest.raises(SizeError, match=r"80%.*the card's memory, which is not known"):
        parse_size("80%", device_bytes=None)


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (KIB, "1.0 KiB"),
        (812 * MIB, "812.0 MiB"),
        (6 * 10**9, "5.59 GiB"),
        (MIB - 1, "1.0 MiB"),
        (GIB - 1, "1.00 GiB"),
        (GIB - MIB // 10, "1023.9 MiB"),
        (2048 * GIB, "2.00 TiB"),
        (-3 * GIB, "-3.00 GiB"),
    ],
)
def test_sizes_are_printed_in_the_largest_unit_that_fits(n_bytes: int, text: str) -> None:
    assert format_size(n_bytes) == text


@given(st.integers(min_value=1, max_value=1 << 50))
def test_what_is_printed_is_read_back_to_within_half_of_the_last_digit(n_bytes: int) -> None:
    text = format_size(n_bytes)
    half_digit_bytes = {"TiB": 1024 * GIB // 200, "GiB": GIB // 200, "MiB": MIB // 20, "KiB": KIB // 20, "B": 0}
    unit = text.split()[1]
    assert abs(parse_size(text, device_bytes=None) - n_bytes) <= half_digit_bytes[unit] + 1


@given(st.text(max_size=12) | st.from_regex(r"\s*[0-9.]{0,6}\s*[a-zA-Z%]{0,4}\s*", fullmatch=True))
def test_any_text_is_read_as_a_positive_size_or_refused(text: str) -> None:
    try:
        size_bytes = parse_size(text, device_bytes=8 * GIB)
    except SizeError as error:
        assert len(str(error).splitlines()) == 1
    else:
        assert isinstance(size_bytes, int)
        assert size_bytes >= 1


@given(st.integers(min_value=0, max_value=1 << 50), st.integers(min_value=0, max_value=1 << 50))
def test_a_smaller_number_never_prints_a_larger_size(first: int, second: int) -> None:
    small, large = sorted((max(first, 1), max(second, 1)))
    read = [parse_size(format_size(n_bytes), device_bytes=None) for n_bytes in (small, large)]
    assert read[0] <= read[1]
