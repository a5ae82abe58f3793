"""Print the 20 slowest tests of pytest's JUnit reports: python tests/slowest.py REPORT.xml..."""

from __future__ import annotations

import sys
from xml.etree import ElementTree

cases = [case for path in sys.argv[1:] for case in ElementTree.parse(path).iter("testcase")]
cases.sort(key=lambda case: -float(case.attrib["time"]))
print(f"-- the slowest of {len(cases)} tests, seconds with their fixtures")
for case in cases[:20]:
    print(f"{float(case.attrib['time']):8.1f}  {case.attrib['classname']}::{case.attrib['name']}")
