"""`mindio-tft drill -- <training command>`: a user's own job under faults on purpose, and what became of each.

options   the command line, checked before anything starts
job       runs the training command with TFT_INJECT and takes in its output
findings  joins schedule, firings and recovery records; compares losses (pure)
view      the report on the terminal, and as JSON
picture   the timeline as SVG (pure)
page      the report as one HTML file (pure)
main      all of it in order
"""
