"""Riffle shuffle: the cards are cut into two hands and fall together one by one. A number that is
drawn for each shuffle says where the cards are cut, and which hand begins.
"""

a, b, c, d, e = 1, 2, 3, 4, 5
number = 2026
for shuffle in range(1, 801):
    number = (75 * number + 74) % 65537
    if number % 4 == 0:
        a, b, c, d, e = a, d, b, e, c
    elif number % 4 == 1:
        a, b, c, d, e = d, a, e, b, c
    elif number % 4 == 2:
        a, b, c, d, e = c, a, d, b, e
    else:
        a, b, c, d, e = a, c, b, d, e
    if shuffle % 8 == 0:
        if number % 5 == 0:
            print('a', a)
        elif number % 5 == 1:
            print('b', b)
        elif number % 5 == 2:
            print('c', c)
        elif number % 5 == 3:
            print('d', d)
        else:
            print('e', e)
