"""Misspelt variables are told, not ignored."""

from __future__ import annotations

from mindio_tft_patch.variables import complaints, known_variables, unknown_variables


def test_a_misspelt_variable_is_told_with_the_name_that_was_meant() -> None:
    environ = {"TTP_PROT": "8124", "TFT_XYZZY": "1", "HIGH_AVAILABILTY": "dump", "PATH": "/bin", "TTP_PORT": "8000"}
    assert unknown_variables(environ) == {
        "HIGH_AVAILABILTY": "HIGH_AVAILABILITY",
        "TFT_XYZZY": "",
        "TTP_PROT": "TTP_PORT",
    }
    assert complaints({"TTP_PROT": "8124"}) == [
        "TTP_PROT=8124 is not a variable of this product; did you mean TTP_PORT?"
    ]


def test_every_variable_of_the_product_is_known() -> None:
    assert {"TTP_ADDR", "TTP_OT", "TFT_HANG_SECONDS", "HIGH_AVAILABILITY", "TFT_MATRIX"} <= known_variables()
    assert unknown_variables(dict.fromkeys(known_variables(), "1")) == {}
