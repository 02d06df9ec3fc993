//! Sizes as people write them.

/// Parses `512MB`, `20GB`, `1.5GiB` or plain bytes.
pub fn parse(text: &str) -> Result<u64, String> {
    let bad = || format!("expected a size such as 512MB, 20GB or 1.5GiB, not {text:?}");
    let at = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(at);
    let factor: u64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "kb" | "k" => 1_000,
        "mb" | "m" => 1_000_000,
        "gb" | "g" => 1_000_000_000,
        "tb" | "t" => 1_000_000_000_000,
        "kib" => 1 << 10,
        "mib" => 1 << 20,
        "gib" => 1 << 30,
        "tib" => 1 << 40,
        _ => return Err(bad()),
    };
    if let Ok(n) = number.parse::<u64>() {
        return n.checked_mul(factor).ok_or_else(bad);
    }
    let n: f64 = number.parse().map_err(|_| bad())?;
    let bytes = n * factor as f64;
    if bytes.is_finite() && (0.0..u64::MAX as f64).contains(&bytes) { Ok(bytes as u64) } else { Err(bad()) }
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn units() {
        assert_eq!(parse("512MB"), Ok(512_000_000));
        assert_eq!(parse("20GB"), Ok(20_000_000_000));
        assert_eq!(parse("1.5GiB"), Ok(3 << 29));
        assert_eq!(parse("0"), Ok(0));
        assert_eq!(parse("7 b"), Ok(7));
        for bad in ["", "GB", "-1GB", "1.2.3GB", "5XB", "99999999999TB", "1e9"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
