from benchmarks.harness.calibration import Calibration


def test_the_line_names_every_figure() -> None:
    line = Calibration(17.25, {"1": 0.1374, "32": 0.378}).line()
    assert line == "calibration: 17.2 GB/s read; 576→3072 int8 product 0.137 ms at 1 rows, 0.378 ms at 32 rows"
