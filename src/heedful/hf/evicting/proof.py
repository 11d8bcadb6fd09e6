def prove(*a): pass
