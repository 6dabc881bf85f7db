"""Growth is fitted per role, after what a role needs to get going."""

import pytest
from leaks import rows


def test_growth_is_that_of_each_role_by_steps_not_by_time():
    beats = []
    for n in range(50):
        settled = max(n, 10)
        use = {"time": 1000.0 + 5 * n, "threads": 9, "open_files": 20}
        beats.append({"role": "trainer_0", "rss_mib": 500.0 if n < 10 else 600.0, **use})
        beats.append({"role": "driver", "rss_mib": 300.0 + settled, "objects": 7, **use})
    driver, trainer = rows(beats, num_steps=490)
    assert trainer[:4] == ["trainer_0", "50", "600", "+0.00"]
    assert driver[0] == "driver (7 to 7 objects of Ray's)"
    assert float(driver[3]) == pytest.approx(10.0)  # 1 MiB a heartbeat, ten steps each
    assert driver[4:] == ["9 to 9", "20 to 20"]
