"""What a person sees in a terminal: one file a screen, each a function of a console and a record.

Nothing here computes a figure; everything reads at 80 columns, without colour, and through a pipe.
Imported only by the verb that shows something, so that --json pays for none of it.
"""
