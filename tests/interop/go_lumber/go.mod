module levada-tests/golumber

go 1.26.0

require github.com/elastic/go-lumber v0.2.0

require github.com/klauspost/compress v1.15.9 // indirect
