"""The growth of each role is fitted without its warm-up."""

import pytest
from leaks import rows


def test_growth_is_measured_per_role_and_per_step():
    beats = []
    for n in range(50):
        warm = max(n, 10)
        use = {"time": 1000.0 + 5 * n, "threads": 9, "open_files": 20}
        beats.append({"role": "trainer_0", "rss_mib": 500.0 if n < 10 else 600.0, **use})
        beats.append({"role": "driver", "rss_mib": 300.0 + warm, "objects": 7, **use})
    driver, trainer = rows(beats, num_steps=490)
    assert trainer[:4] == ["trainer_0", "50", "600", "+0.00"]
    assert driver[0] == "driver (7 to 7 Ray objects)"
    assert float(driver[3]) == pytest.approx(10.0)  # 1 MiB per heartbeat, ten steps each
    assert driver[4:] == ["9 to 9", "20 to 20"]
